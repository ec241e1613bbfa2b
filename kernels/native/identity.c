// Which sources this library was built from; checked when it is loaded.
const char *gl_source_hash(void) { return GRAFTLINE_SOURCE_HASH; }
