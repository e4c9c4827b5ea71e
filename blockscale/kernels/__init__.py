"""Fast versions of the ops: what the machine has decides which kernel serves, and plain torch always can."""
