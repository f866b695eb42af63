"""What the machine knows of single libraries, one file per library, used when the program imports it."""
