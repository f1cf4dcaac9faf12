"""What an engine can be built for, one file each."""
