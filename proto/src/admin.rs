//! JSON of the admin socket.
