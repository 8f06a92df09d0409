/* ========================================================================== */
/* >>env                                                MARK: - env (private) */
/* Settings from the environment, time limits and deadlines.                  */
/* Needs: >>error.                                                            */
/* ========================================================================== */

/* Returns the value of an environment variable; NULL if the variable is unset or empty. */
static const char *tshi_env_text(const char *name) {
    const char *text = getenv(name);
    return text && text[0] ? text : NULL;
}

/* Reads a whole number at *at and moves *at past its digits. Returns 0 if there are no digits,
 * or if the number has leading zeros or is above high. */
static int tshi_env_digits(const char **at, int64_t high, int64_t *value) {
    const char *first = *at, *end = first;
    *value = 0;
    for (; *end >= '0' && *end <= '9'; end++) {
        if (*value > high / 10) return 0; /* this digit would make it greater than high */
        *value = *value * 10 + (*end - '0');
    }
    *at = end;
    return end > first && (first[0] != '0' || end == first + 1) && *value <= high;
}

/* Reports that an environment variable has an invalid value: fills *error with the sentence 'NAME
 * is "value"; it takes ...'. Returns -1. */
TSH_PRINTF(4, 5)
static int tshi_env_refuse(const char *name, const char *text, tsh_error *error, const char *takes,
                           ...) {
    va_list list;
    size_t i;
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is \"%.100s\"; it takes ", name, text);
    i = strlen(error->message);
    va_start(list, takes);
    tsh_text_format(error->message + i, sizeof error->message - i, takes, list);
    va_end(list);
    return -1;
}

/* Reads an environment variable as a whole number from low to high. Returns 1 and sets *value; 0 if
 * it is unset or empty; -1 and an error if its value is not accepted. */
static int tshi_env_int(const char *name, int low, int high, int *value, tsh_error *error) {
    const char *text = tshi_env_text(name), *at = text;
    int64_t number;
    if (!text) return 0; /* the variable is unset or empty: nothing to read */
    if (!tshi_env_digits(&at, high, &number) || *at || number < low)
        return tshi_env_refuse(name, text, error,
                               high - low == 1 ? "%d or %d" : "a whole number from %d to %d", low,
                               high);
    *value = (int)number;
    return 1;
}
