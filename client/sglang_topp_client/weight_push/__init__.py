"""Weight pushes: pause every engine of a fleet, update its weights, and continue."""
