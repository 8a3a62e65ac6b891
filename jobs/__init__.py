"""Who does what when: config, plan, Ray driver, worker actor, failure policy, progress, CLI."""
