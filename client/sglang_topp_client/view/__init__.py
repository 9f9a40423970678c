"""Build the page of `sglang-topp view`: one offline HTML file with statistics and tokens of rollouts."""
