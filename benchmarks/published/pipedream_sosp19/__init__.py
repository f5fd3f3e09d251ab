"""PipeDream's results at SOSP 2019, solved and run."""
