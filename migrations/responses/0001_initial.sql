-- Responses that clients asked to be kept (/v1/responses with `store`). A file of its own beside the audit store: these rows hold
-- what people wrote, come and go, and may be deleted as a whole.

CREATE TABLE response (
    seq      INTEGER PRIMARY KEY,
    id       TEXT    NOT NULL UNIQUE,
    -- Id of the API key.
    owner    TEXT    NOT NULL,
    -- The object as clients get it.
    object   TEXT    NOT NULL,
    -- The conversation that it ends, as chat messages.
    messages TEXT    NOT NULL,
    -- Of a background response that has not ended: all that is needed to run it again.
    asked    TEXT,
    bytes    INTEGER NOT NULL
) STRICT;

CREATE INDEX response_bytes ON response (bytes);
CREATE INDEX response_open ON response (seq) WHERE asked IS NOT NULL;
