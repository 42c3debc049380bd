"""The comparison of batching modes."""
