"""Parts that the programs share: settings, files, ranks, launching and exit codes."""
