/* A driver library with nothing in it but what shows that it was loaded. */
int gpufence_simulated(void) { return 1; }
