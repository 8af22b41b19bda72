//! What one side says about itself.

use super::{LABEL_HELLO, RejectReason, SECRET_BYTES};
use crate::bytes::{Reader, Writer};
use crate::{Error, ErrorKind, Result, Token};

/// Bytes of the tag at the end of an initiator's hello.
pub const TAG_BYTES: usize = 8;

/// Stands in [`Hello::rank`] for "none": the store server, a launcher.
pub const NO_RANK: u32 = u32::MAX;

/// What a side of a connection is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Role {
    /// Asks a store.
    StoreClient = 1,
    /// Is a store.
    StoreServer = 2,
    /// A rank, on a connection for payload.
    Peer = 3,
    /// A rank, on a connection for control messages and aborts.
    Control = 4,
    /// A rank, on a local socket that hands over shared memory.
    SharedMemory = 5,
    /// The launcher of a host.
    Launcher = 6,
}

impl Role {
    /// All roles, in the order of their codes.
    pub const ALL: [Role; 6] = [
        Role::StoreClient,
        Role::StoreServer,
        Role::Peer,
        Role::Control,
        Role::SharedMemory,
        Role::Launcher,
    ];
}

/// What one side says about itself. Believed only after the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What this side is there for.
    pub role: Role,
    /// Which of several parallel connections between two ranks.
    pub stream: u16,
    /// The job, as [`Token::job_id`](crate::Token::job_id) names it.
    pub job: u64,
    /// How often the job has formed its groups anew.
    pub epoch: u32,
    /// The group within the epoch.
    pub group: u32,
    /// Rank of this side within the group, or [`NO_RANK`].
    pub rank: u32,
    /// Ranks that this side expects in the group; 0 where that means nothing.
    pub world: u32,
    /// Fresh random bytes. The state machines fill them in; what the caller
    /// puts here is overwritten.
    pub nonce: [u8; 32],
}

impl Hello {
    /// Encoded size in bytes.
    pub const BYTES: usize = Self::TAGGED_BYTES + TAG_BYTES;

    /// What a tag is made of: everything before it.
    const TAGGED_BYTES: usize = 4 + 8 + 4 * 4 + SECRET_BYTES;

    /// A hello without rank, in epoch, group and stream 0.
    pub const fn new(role: Role, job: u64) -> Self {
        Self {
            role,
            stream: 0,
            job,
            epoch: 0,
            group: 0,
            rank: NO_RANK,
            world: 0,
            nonce: [0; SECRET_BYTES],
        }
    }

    /// The same with this rank.
    pub const fn rank(self, rank: u32) -> Self {
        Self { rank, ..self }
    }

    /// The same with this world size.
    pub const fn world(self, world: u32) -> Self {
        Self { world, ..self }
    }

    /// The same in this epoch.
    pub const fn epoch(self, epoch: u32) -> Self {
        Self { epoch, ..self }
    }

    /// The same in this group.
    pub const fn group(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// The same on this stream.
    pub const fn stream(self, stream: u16) -> Self {
        Self { stream, ..self }
    }

    /// Compares job, epoch, group and world of a peer with this side's own, in
    /// this order, and names the first that differs. Role, rank and stream
    /// have no general rule: they are the caller's to judge.
    ///
    /// # Errors
    /// The reason to reject the peer with.
    pub fn check_same_group(&self, peer: &Hello) -> Result<(), RejectReason> {
        if self.job != peer.job {
            Err(RejectReason::WrongJob)
        } else if self.epoch != peer.epoch {
            Err(RejectReason::WrongEpoch)
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
            .put(&self.epoch.to_le_bytes())
            .put(&self.group.to_le_bytes())
            .put(&self.rank.to_le_bytes())
            .put(&self.world.to_le_bytes())
            .put(&self.nonce);
        // Only an initiator's hello has a tag: an acceptor's follows its proof.
        out
    }

    /// [`encode`](Self::encode) with the tag of an initiator.
    pub(super) fn encode_tagged(&self, token: &Token) -> [u8; Self::BYTES] {
        let mut out = self.encode();
        let (hello, tag) = out.split_at_mut(Self::TAGGED_BYTES);
        tag.copy_from_slice(&token.mac(&[LABEL_HELLO, hello])[..TAG_BYTES]);
        out
    }

    /// The tag of an encoded hello, if it was made with this token.
    pub(super) fn valid_tag(hello: &[u8; Self::BYTES], token: &Token) -> Option<[u8; TAG_BYTES]> {
        let (hello, tag) = hello.split_last_chunk::<TAG_BYTES>()?;
        token
            .mac_starts_with(&[LABEL_HELLO, hello], tag)
            .then_some(*tag)
    }

    /// All but the tag, which says nothing to who has another token.
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Hello> {
        let mut r = Reader::new(bytes);
        let role = r.u8()?;
        let role = Role::ALL
            .into_iter()
            .find(|known| *known as u8 == role)
            .ok_or(Error::with(ErrorKind::UnknownCode, u64::from(role), 0))?;
        let pad = r.u8()?;
        let hello = Hello {
            role,
            stream: r.u16()?,
            job: r.u64()?,
            epoch: r.u32()?,
            group: r.u32()?,
            rank: r.u32()?,
            world: r.u32()?,
            nonce: r.array()?,
        };
        if pad != 0 {
            return Err(Error::with(ErrorKind::ReservedNotZero, u64::from(pad), 0));
        }
        Ok(hello)
    }
}
