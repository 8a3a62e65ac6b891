"""Local model folders for the demo and the tests: no hub is asked, nothing is downloaded."""
