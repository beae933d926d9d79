"""What is offered under which name, how healthy it is, and the picture of a node."""
