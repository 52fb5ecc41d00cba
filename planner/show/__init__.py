"""Show what was found, on a command line, in pictures and in a report; nothing else imports it."""
