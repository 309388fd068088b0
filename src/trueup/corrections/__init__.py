"""What turns a policy gap into weights and keep flags."""
