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

/* Reads a whole number at *at and moves *at past its digits. Returns 0 if there are no digits, it
 * has leading zeros, or it is above high. */
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

/* Fills error with 'NAME is "value"; it takes ...'. Returns -1. */
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

TSH_API int tsh_env_int(const char *name, int low, int high, int *value, tsh_error *error) {
    const char *text = tshi_env_text(name), *at = text;
    int64_t number;
    if (!text) return 0; /* variable unset or empty */
    if (!tshi_env_digits(&at, high, &number) || *at || number < low)
        return tshi_env_refuse(name, text, error,
                               high - low == 1 ? "%d or %d" : "a whole number from %d to %d", low,
                               high);
    *value = (int)number;
    return 1;
}

TSH_API int tsh_env_seconds(const char *name, int64_t *ns, tsh_error *error) {
    const int64_t second = INT64_C(1000000000);
    const char *text = tshi_env_text(name), *at = text;
    int64_t number = 0, unit = second; /* unit: value in ns of a digit 1 at *at */
    int right;                         /* 1: the text is valid so far */
    if (!text) return 0;
    right = tshi_env_digits(&at, second, &number);
    number *= second;
    if (right && *at == '.') {
        const char *point = at++;
        for (; *at >= '0' && *at <= '9'; at++) {
            unit /= 10;
            if (unit) number += unit * (*at - '0');
            if (*at > '0' && number == 0) number = 1; /* less than 1 ns; 0 is no limit */
        }
        right = at > point + 1; /* at least one digit after the point */
    }
    if (!right || *at)
        return tshi_env_refuse(name, text, error,
                               "a number of seconds, such as 30 or 0.5, up to %lld",
                               (long long)second);
    *ns = number;
    return 1;
}

TSH_API int tsh_time_limit(double given, const char *name, const char *variable, double otherwise,
                           int64_t *ns, tsh_error *error) {
    const int64_t never = INT64_C(1) << 61; /* in ns: 73 years */
    *ns = (int64_t)(otherwise * 1e9);
    if (given != given) {
        (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s is not a number (NaN)", name);
        return 0;
    }
    if (given != 0)
        *ns = given < 0 || given > 1e9 ? never : (int64_t)(given * 1e9); /* negative: no limit */
    else if (tsh_env_seconds(variable, ns, error) < 0)
        return 0;
    if (given == 0 && *ns == 0) *ns = never; /* 0 in the environment: no limit */
    return 1;
}

TSH_API int tsh_timeout(double given, const char *name, int64_t *ns, tsh_error *error) {
    return tsh_time_limit(given, name, "TSHARD_TIMEOUT", 300, ns, error);
}

TSH_API int64_t tsh_deadline(int64_t timeout_ns, int64_t otherwise) {
    int64_t now = tsh_now(), wait = timeout_ns ? timeout_ns : otherwise;
    return wait > INT64_MAX - now ? INT64_MAX : now + wait; /* must not overflow */
}

TSH_API int tsh_env_text(const char *name, char *text, size_t capacity, tsh_error *error) {
    const char *value = tshi_env_text(name);
    if (!value) return 0;
    if (strlen(value) < capacity) { /* fits, with its final 0 */
        memcpy(text, value, strlen(value) + 1);
        return 1;
    }
    (void)tsh_error_set(error, TSH_ERR_ARGUMENT, -1, "%s has %lu bytes; it takes at most %lu", name,
                        (unsigned long)strlen(value), (unsigned long)capacity - 1);
    return -1;
}
