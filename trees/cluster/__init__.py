"""Trees for several boxes: inside each box, between boxes, and the three phases (Blink section 3.5)."""
