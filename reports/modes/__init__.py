"""The page of a comparison of batching modes."""
