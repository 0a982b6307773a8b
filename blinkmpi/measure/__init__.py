"""What the machine really does: links measured, selection tables tuned."""
