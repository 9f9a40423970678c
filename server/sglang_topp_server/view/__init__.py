"""Build the page of `sglang-topp view`: one offline HTML file that shows rollouts and their statistics."""
