"""What goes wrong: the option set of a seed, who decides when, and what each class of faults does."""
