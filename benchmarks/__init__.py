"""What the project measures about itself; each file is a command with --json."""
