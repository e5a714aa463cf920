"""How good is a policy: suites of tasks, and figures with intervals."""
