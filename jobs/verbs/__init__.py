"""Bodies of the command's verbs that read a run, kept apart from how they are typed."""
