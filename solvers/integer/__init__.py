"""The integer programme: save sets operator by operator, solved through PuLP; starts from the chain's answer."""
