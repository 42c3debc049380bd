"""The step loop: a policy's plan is checked, placed, executed and committed."""
