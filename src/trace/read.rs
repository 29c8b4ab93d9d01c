//! Reads a rank's file.

use std::io::{self, Read};

use serde::Deserialize;

use super::record::{Record, RECORD_BYTES};
use super::write::MAGIC;

/// Format of the files that this version writes and reads.
pub const VERSION: u32 = 3;

/// Ranks of a job, at most.
const RANKS_MAX: u32 = 1 << 24;

/// What a file says of its rank, and the names that its records number.
#[derive(Clone, Debug, Deserialize, serde::Serialize, PartialEq, Eq)]
pub struct Header {
    /// Version of the library.
    pub library: String,
    /// The job, the same in all its ranks.
    pub job: u64,
    /// Rank in MPI_COMM_WORLD.
    pub rank: u32,
    /// Ranks there.
    pub size: u32,
    /// The host.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// Times are those of a simulated node.
    pub is_simulated: bool,
    /// The clock's reading when the file was opened, ns, and the time of day then, ns since 1970.
    pub opened: [u64; 2],
    /// NUMA nodes of the processors that the process may run on.
    #[serde(default)]
    pub numa: Vec<i32>,
    /// Options that were set: names and values.
    #[serde(default)]
    pub options: std::collections::BTreeMap<String, String>,
    /// Names of MPI functions.
    pub functions: Vec<String>,
    /// Names of states.
    pub states: Vec<String>,
    /// Names of protocols: number 1 is the first.
    pub protocols: Vec<String>,
    /// Names of the reasons why a message is not carried.
    pub reasons: Vec<String>,
    /// Names of UCX's functions.
    pub ucp: Vec<String>,
}

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The operating system says so.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is something else.
    #[error("it is no trace of Anabranch's")]
    Other,
    /// There is no such rank.
    #[error("its header is damaged: rank {0} of {1}")]
    Ranks(u32, u32),
    /// It is of another version.
    #[error("its format is {0}, and this command reads {VERSION}: use the command of the version that wrote it")]
    Version(u32),
    /// It is cut off in its header.
    #[error("it ends in its header")]
    Short,
    /// Its header is damaged.
    #[error("its header is damaged: {0}")]
    Header(serde_json::Error),
}

/// A file that is being read, record by record.
pub struct Reader<R> {
    from: R,
    /// What it says of its rank.
    pub header: Header,
    /// Bytes of a record that was not written to its end, or records that are none: the file is torn.
    pub torn: u64,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// See [`Unreadable`].
    pub fn new(mut from: R) -> Result<Reader<R>, Unreadable> {
        let mut beginning = [0; 16];
        let is_long = from.read_exact(&mut beginning).is_ok();
        if !is_long || beginning[..8] != MAGIC[..] {
            return Err(Unreadable::Other);
        }
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| beginning[at + byte]));
        let (version, length) = (word(8), word(12));
        if version != VERSION {
            return Err(Unreadable::Version(version));
        }
        if length > 1 << 20 {
            return Err(Unreadable::Other);
        }
        let mut text = vec![0; length as usize];
        from.read_exact(&mut text)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => Unreadable::Short,
                _ => Unreadable::Io(error),
            })?;
        let header: Header = serde_json::from_slice(&text).map_err(Unreadable::Header)?;
        if header.rank >= header.size || header.size > RANKS_MAX {
            return Err(Unreadable::Ranks(header.rank, header.size));
        }
        Ok(Reader {
            from,
            header,
            torn: 0,
        })
    }

    /// The next record; `None` at the end of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn next_record(&mut self) -> io::Result<Option<Record>> {
        loop {
            let mut bytes = [0; RECORD_BYTES];
            let mut filled = 0;
            while filled < RECORD_BYTES {
                match self.from.read(&mut bytes[filled..])? {
                    0 => break,
                    count => filled += count,
                }
            }
            if filled < RECORD_BYTES {
                self.torn += filled as u64;
                return Ok(None);
            }
            let word =
                |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
            match Record::decode(&std::array::from_fn(word)) {
                Some(record) => return Ok(Some(record)),
                None => self.torn += RECORD_BYTES as u64,
            }
        }
    }
}
