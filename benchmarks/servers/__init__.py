"""Servers as a user starts them: options, deployments, requests, memory."""
