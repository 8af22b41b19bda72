//! A value that a server stores when a client ends.

use std::io::Write;
use std::net::TcpStream;

use phalanx_wire::store_msg::Request;

/// A value that is stored when this process ends; see [`Store::leave_will`](crate::Store::leave_will).
/// Dropping it removes the will. It belongs to one connection: when the store moves to
/// another server ([`TcpStore::move_with`](crate::TcpStore::move_with)), it is lost, and another one must be left.
#[derive(Debug)]
pub struct Will {
    /// Its own connection, and memory for a request.
    pub(crate) stream: TcpStream,
    pub(crate) buffer: Vec<u8>,
    pub(crate) key: String,
    /// Not to be removed on drop.
    pub(crate) executed: bool,
}

impl Will {
    /// Stores the value now, as if this process had ended.
    pub fn execute(mut self) {
        self.executed = true;
    }
}

impl Drop for Will {
    fn drop(&mut self) {
        if self.executed {
            return; // the server executes it when the connection closes
        }
        self.buffer.clear();
        let remove = Request::Will {
            key: &self.key,
            value: None,
        };
        // The server reads it before the end of the connection. The response is not
        // needed.
        if remove.encode(&mut self.buffer).is_ok() {
            let _ = self.stream.write_all(&self.buffer);
        }
    }
}
