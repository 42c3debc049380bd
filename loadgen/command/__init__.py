"""What each verb of the command line does, apart from its flags (`loadgen.verbs`)."""
