"""The command line: one file a command, named like it. Parse, call, print, exit code; no logic."""
