"""Many benchmark jobs from one file, their results and their pictures."""
