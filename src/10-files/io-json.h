/* ========================================================================== */
/* >>io-json                                        MARK: - io-json (private) */
/* Reads the JSON of headers and indices, in place.                           */
/* Needs: >>io.                                                               */
/* ========================================================================== */

/* -- reading: JSON ------------------------------------------------------------
 * Parses only what a header or an index may contain, in one pass without recursion. Strings are
 * decoded in place, since none gets longer. The text ends with a NUL, where every parser stops.
 * After an error, parsers return 0 or "", and loops over elements end. */

/* Returns what the file being parsed should be, for errors: "safetensors file" or "index of
 * ...". */
static const char *tshi_io_form(const tshi_io *io) {
    return io->index ? "index of safetensors files" : "safetensors file";
}

/* Sets an error: the header or index is wrong at io->at, as `what` says. Returns 0. */
static int tshi_io_bad(const tshi_io *io, const char *what) {
    return tshi_io_fail(io, TSH_ERR_IO, "is no %s: %s at byte %llu%s", tshi_io_form(io), what,
                        (unsigned long long)(io->at - io->text), io->index ? "" : " of its header");
}

/* Skips white space. */
static void tshi_io_skip(tshi_io *io) {
    while (*io->at == ' ' || *io->at == '\t' || *io->at == '\n' || *io->at == '\r') io->at++;
}

/* Skips white space and the character c. Returns 0 if another character follows. */
static int tshi_io_skip_char(tshi_io *io, char c) {
    tshi_io_skip(io);
    if (*io->at != c) return 0;
    io->at++;
    return 1;
}

/* Parses "u" and four hexadecimal digits; returns their value, -1 if they are not there. */
static long tshi_io_hex(tshi_io *io) {
    long value = 0;
    int i;
    if (*io->at != 'u') return -1;
    for (io->at++, i = 0; i < 4; i++, io->at++) {
        const char c = *io->at;
        const long digit = c >= '0' && c <= '9'   ? c - '0'
                           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                  : -1;
        if (digit < 0) return -1; /* not a hexadecimal digit */
        value = value * 16 + digit;
    }
    return value;
}

/* Parses what follows the "\" of an escape like "\u0041" and writes the character that it stands
 * for as UTF-8 at out. Returns the end of the output; NULL for another kind of escape, half a
 * surrogate pair, or NUL. */
static char *tshi_io_unicode(tshi_io *io, char *out) {
    long code = tshi_io_hex(io), low; /* code: code point; low: second half of a surrogate pair */
    int n, i;
    if (code <= 0 || (code >= 0xDC00 && code < 0xE000)) return NULL;
    if (code >= 0xD800 && code < 0xDC00) { /* first half of a surrogate pair */
        if (*io->at != '\\') return NULL;
        io->at++;
        low = tshi_io_hex(io);
        if (low < 0xDC00 || low >= 0xE000) return NULL;
        code = 0x10000 + (code - 0xD800) * 1024 + (low - 0xDC00);
    }
    n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4; /* bytes of UTF-8 */
    for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
    out[0] = (char)(unsigned char)(n == 1 ? code : (0xF00 >> n & 0xFF) | code);
    return out + n;
}

/* Parses a string and returns it, decoded in place and ended by a NUL; "" after an error. */
static const char *tshi_io_string(tshi_io *io) {
    static const char escape[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    const char *found, *wrong = NULL; /* found: where `escape` has the letter; wrong: error */
    char *start, *out;                /* beginning of the decoded string; its end so far */
    int n;                            /* bytes of the next character */
    if (!tshi_io_skip_char(io, '"')) wrong = "there is no string";
    for (start = out = io->at; !wrong && *io->at != '"';) {
        n = tshi_io_utf8((const unsigned char *)io->at);
        if (!n || (unsigned char)*io->at < 0x20) {
            wrong = "a string does not end, or is not UTF-8";
        } else if (*io->at != '\\') {
            for (; n > 0; n--) *out++ = *io->at++;
        } else if (*++io->at && (found = strchr(escape, *io->at)) != NULL) {
            *out++ = meaning[found - escape];
            io->at++;
        } else if (!(out = tshi_io_unicode(io, out))) {
            wrong = "an escape in a string is wrong";
        }
    }
    if (wrong) (void)tshi_io_bad(io, wrong);
    if (wrong) return "";
    io->at++;
    *out = '\0';
    return start;
}

/* Parses a key and the colon after it; returns the key. */
static const char *tshi_io_key(tshi_io *io) {
    const char *key = tshi_io_string(io);
    if (!tshi_io_skip_char(io, ':')) (void)tshi_io_bad(io, "a colon is missing");
    return key;
}

/* Parses an opening bracket, brackets[0]. Returns 1 if an element follows. Returns 0 if the closing
 * bracket, brackets[1], follows, or, with the error `what`, if there is no opening bracket. */
static int tshi_io_open(tshi_io *io, const char *brackets, const char *what) {
    if (!tshi_io_skip_char(io, brackets[0])) return tshi_io_bad(io, what);
    return !tshi_io_skip_char(io, brackets[1]);
}

/* Parses what follows an element. Returns 1 after a comma, 0 after the bracket `close` or an
 * error. */
static int tshi_io_next(tshi_io *io, char close) {
    if (io->ctx->error.code != TSH_OK || tshi_io_skip_char(io, close)) return 0;
    return tshi_io_skip_char(io, ',') || tshi_io_bad(io, "a comma or a bracket is missing");
}

/* Parses digits: sets *out to their value and returns the end of the digits; NULL if the value is
 * greater than max. */
static const char *tshi_io_digits(const char *at, uint64_t max, uint64_t *out) {
    for (*out = 0; *at >= '0' && *at <= '9'; at++) {
        const uint64_t digit = (uint64_t)(*at - '0');
        if (*out > (max - digit) / 10) return NULL;
        *out = *out * 10 + digit;
    }
    return at;
}

/* Parses a whole number from 0 to INT64_MAX / 2 and returns it; 0 after an error. */
static int64_t tshi_io_whole(tshi_io *io) {
    const char *end;
    uint64_t value;
    tshi_io_skip(io);
    if (!(end = tshi_io_digits(io->at, INT64_MAX / 2, &value)))
        return tshi_io_bad(io, "a number is too large");
    if (end == io->at || (*io->at == '0' && end > io->at + 1)) /* no digit, or a leading zero */
        return tshi_io_bad(io, "there is no whole number");
    io->at += end - io->at; /* moves to the end of the number */
    return (int64_t)value;
}

/* Parses a list of whole numbers, such as [1, 2], and stores its first `max` numbers in out.
 * Returns the length of the list. */
static int tshi_io_numbers(tshi_io *io, int64_t *out, int max) {
    int count = 0, more = tshi_io_open(io, "[]", "there is no list");
    for (; more; more = tshi_io_next(io, ']'), count++) {
        const int64_t value = tshi_io_whole(io);
        if (count < max) out[count] = value;
    }
    return count;
}

/* Skips "null". Returns 0 if something else follows. */
static int tshi_io_null(tshi_io *io) {
    tshi_io_skip(io);
    if (strncmp(io->at, "null", 4) != 0) return 0;
    io->at += 4;
    return 1;
}

/* Skips a value of any kind. Brackets are only counted: their kinds need not match. */
static void tshi_io_skip_value(tshi_io *io) {
    int depth = 0;
    do {
        tshi_io_skip(io);
        if (*io->at == '"') {
            (void)tshi_io_string(io);
        } else if (*io->at && strchr("{[}]", *io->at)) {
            depth += *io->at == '{' || *io->at == '[' ? 1 : -1;
            io->at++;
        } else {
            const size_t n = strspn(io->at, depth ? ",:+-.0123456789aeflnrstuE"
                                                  : "+-.0123456789aeflnrstuE");
            if (!n) (void)tshi_io_bad(io, "there is no value");
            io->at += n;
        }
    } while (depth > 0 && io->ctx->error.code == TSH_OK);
    if (depth < 0) (void)tshi_io_bad(io, "there is no value");
}
