"""What a run tells: files, console, trackers."""
