//! The first message of each side.

use super::{LABEL_HELLO, RejectReason, SECRET_BYTES};
use crate::bytes::{Reader, Writer};
use crate::{Error, ErrorKind, Result, Token};

/// Length of the tag at the end of an initiator's hello.
pub const TAG_BYTES: usize = 8;

/// Value of [`Hello::rank`] for a side without a rank: the store server, a launcher.
pub const NO_RANK: u32 = u32::MAX;

/// Role of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Role {
    /// A client of a store.
    StoreClient = 1,
    /// A store server.
    StoreServer = 2,
    /// A rank, on a connection for payload.
    Peer = 3,
    /// A rank, on a connection for aborts and goodbyes.
    Control = 4,
    /// A rank, on a local socket that passes shared memory.
    SharedMemory = 5,
}

crate::codes! { Role as u8: StoreClient, StoreServer, Peer, Control, SharedMemory }

/// Description of one side. Authenticated only by the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Role of this side.
    pub role: Role,
    /// Which connection of the pair, as in frames.
    pub stream: u16,
    /// The job ([`Token::job_id`](crate::Token::job_id)).
    pub job: u64,
    /// Generation of the job's groups: how often they were formed again.
    pub generation: u32,
    /// Number of the group within the generation.
    pub group: u32,
    /// Rank of this side within the group, or [`NO_RANK`].
    pub rank: u32,
    /// World size that this side expects; 0 if not applicable.
    pub world: u32,
    /// Fresh random bytes, set by the state machines.
    pub nonce: [u8; 32],
}

impl Hello {
    /// Encoded size in bytes.
    pub const BYTES: usize = Self::TAGGED_BYTES + TAG_BYTES;

    /// Length of the part that the tag authenticates: everything before it.
    const TAGGED_BYTES: usize = 4 + 8 + 4 * 4 + SECRET_BYTES;

    /// A hello without a rank, in generation, group and stream 0.
    pub const fn new(role: Role, job: u64) -> Self {
        Self {
            role,
            stream: 0,
            job,
            generation: 0,
            group: 0,
            rank: NO_RANK,
            world: 0,
            nonce: [0; SECRET_BYTES],
        }
    }

    /// Sets the rank.
    pub const fn rank(self, rank: u32) -> Self {
        Self { rank, ..self }
    }

    /// Sets the world size.
    pub const fn world(self, world: u32) -> Self {
        Self { world, ..self }
    }

    /// Sets the generation.
    pub const fn generation(self, generation: u32) -> Self {
        Self { generation, ..self }
    }

    /// Sets the group.
    pub const fn group(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// Sets the stream.
    pub const fn stream(self, stream: u16) -> Self {
        Self { stream, ..self }
    }

    /// Compares job, generation, group and world size of a peer with this side's, in
    /// this order. The caller checks role, rank and stream.
    ///
    /// # Errors
    /// The reason to reject the peer: the first difference.
    pub fn check_same_group(&self, peer: &Hello) -> Result<(), RejectReason> {
        if self.job != peer.job {
            Err(RejectReason::WrongJob)
        } else if self.generation != peer.generation {
            Err(RejectReason::WrongGeneration)
        } else if self.group != peer.group {
            Err(RejectReason::WrongGroup)
        } else if self.world != peer.world {
            Err(RejectReason::WrongWorld)
        } else {
            Ok(())
        }
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        Writer::new(&mut out)
            .put(&[self.role as u8, 0])
            .put(&self.stream.to_le_bytes())
            .put(&self.job.to_le_bytes())
            .put(&self.generation.to_le_bytes())
            .put(&self.group.to_le_bytes())
            .put(&self.rank.to_le_bytes())
            .put(&self.world.to_le_bytes())
            .put(&self.nonce);
        // Only an initiator's hello has a tag: an acceptor has already proven the token.
        out
    }

    /// [`encode`](Self::encode) with the tag of an initiator.
    pub(super) fn encode_tagged(&self, token: &Token) -> [u8; Self::BYTES] {
        let mut out = self.encode();
        let (hello, tag) = out.split_at_mut(Self::TAGGED_BYTES);
        tag.copy_from_slice(&token.mac(&[LABEL_HELLO, hello])[..TAG_BYTES]);
        out
    }

    /// The tag of an encoded hello, if it is valid for this token.
    pub(super) fn valid_tag(hello: &[u8; Self::BYTES], token: &Token) -> Option<[u8; TAG_BYTES]> {
        let (hello, tag) = hello.split_last_chunk::<TAG_BYTES>()?;
        token
            .mac_starts_with(&[LABEL_HELLO, hello], tag)
            .then_some(*tag)
    }

    /// Decodes everything but the tag.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Hello> {
        let mut r = Reader::new(bytes);
        let role = Role::from_code(r.u8()?)?;
        let pad = r.u8()?;
        let hello = Hello {
            role,
            stream: r.u16()?,
            job: r.u64()?,
            generation: r.u32()?,
            group: r.u32()?,
            rank: r.u32()?,
            world: r.u32()?,
            nonce: r.array()?,
        };
        if pad != 0 {
            return Err(Error::with(ErrorKind::ReservedNotZero, pad, 0u8));
        }
        Ok(hello)
    }
}
