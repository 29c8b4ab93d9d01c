//! An input of a fuzz target, read as a list of choices. The command and the simulated driver have this file, too.

/// Reads an input from its beginning to its end; then all is 0.
pub(crate) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(bytes)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub(crate) fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A number below a limit.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        let both = u64::from(self.byte()) << 8 | u64::from(self.byte());
        // Two bytes reach everywhere only in what is short.
        let number = if limit > 1 << 16 {
            both << 16 | u64::from(self.byte()) << 8 | u64::from(self.byte())
        } else {
            both
        };
        number % limit.max(1)
    }

    /// A text that something was changed in: bytes replaced, left out, put in, doubled, or cut off.
    pub(crate) fn edited(&mut self, sample: &[u8]) -> Vec<u8> {
        /// What numbers are replaced by.
        const NUMBERS: [&[u8]; 8] = [
            b"-1",
            b"1e999",
            b"99999999999999999999",
            b"0",
            b"NaN",
            b"[]",
            b"null",
            b"18446744073709551615",
        ];
        let mut text = sample.to_vec();
        for _ in 0..self.byte() % 8 {
            let at = self.below(text.len() as u64 + 1) as usize;
            let count = usize::from(self.byte() % 24).min(text.len() - at);
            match self.byte() % 6 {
                0 => text.truncate(at),
                1 => drop(text.drain(at..at + count)),
                2 => text.insert(at, self.byte()),
                3 => {
                    let twice: Vec<u8> = text[at..at + count].to_vec();
                    text.splice(at..at, twice);
                }
                4 => {
                    let number = NUMBERS[usize::from(self.byte()) % NUMBERS.len()];
                    let digits = |byte: &&u8| byte.is_ascii_digit() || **byte == b'.';
                    let from = text[at..].iter().position(|byte| byte.is_ascii_digit());
                    let from = at + from.unwrap_or(0);
                    let length = text[from..].iter().take_while(digits).count();
                    text.splice(from..from + length, number.iter().copied());
                }
                _ => {
                    if let Some(byte) = text.get_mut(at) {
                        *byte = self.byte();
                    }
                }
            }
        }
        text
    }

    pub(crate) fn text(&mut self, sample: &str) -> String {
        String::from_utf8_lossy(&self.edited(sample.as_bytes())).into_owned()
    }
}
