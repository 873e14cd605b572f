"""Contracts: what every entry of a registry must fulfil, through the public interface."""
