"""Programs behind the `sdp4bit` command: pretraining, comparison, planning, report and self-test."""
