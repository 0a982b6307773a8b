/* The CUDA driver as far as the library asks it: stream 7 is captured. */
int cuStreamIsCapturing(void *stream, int *status) { return *status = stream == (void *)7, 0; }
