"""Known failures of the field as cases that anyone's correction can be run against."""
