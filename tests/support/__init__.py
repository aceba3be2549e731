"""What several tests share: models, policies, programs, and how a jaxpr is read."""
