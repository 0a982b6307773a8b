"""What is known of calls between GPUs: what they take, and which protocol carries which size."""
