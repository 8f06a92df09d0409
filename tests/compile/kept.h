/* For gcc 12's analyzer, before a backend that is read together with the core: it takes memory that
 * is kept in a structure, or whose address is kept by its distance, for lost. */
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
