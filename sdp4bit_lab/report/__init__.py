"""`sdp4bit report`: an HTML page about training runs."""
