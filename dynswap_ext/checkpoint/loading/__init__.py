"""What `load` is made of: skeletons, names, reading and converting, and models that stay what they were."""
