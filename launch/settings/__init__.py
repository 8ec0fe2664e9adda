"""From files, environment and command line to a checked config, or to every mistake at once."""
