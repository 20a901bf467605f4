"""What layers with a state send, how exact they are in pieces, and how long they take."""
