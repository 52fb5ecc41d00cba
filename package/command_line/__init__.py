"""The command line; torch is imported only once a command's arguments were found right."""
