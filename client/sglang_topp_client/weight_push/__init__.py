"""Weight pushes: pause every engine of a fleet, update the engines' weights, and let the engines continue."""
