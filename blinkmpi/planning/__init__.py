"""Plans: which packings a job has, and which of them carries a call of which size. Pure."""
