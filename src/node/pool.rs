//! Numbers that are handed out and come back.

#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Vec<u32>,
    used: Vec<bool>,
}

impl Pool {
    pub(super) fn fill(&mut self, count: u32) {
        self.free = (0..count).rev().collect();
        self.used = vec![false; count as usize];
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.used[index as usize] = true;
        Some(index)
    }

    /// False if the number is not out.
    pub(super) fn give(&mut self, index: u32) -> bool {
        match self.used.get_mut(index as usize) {
            Some(used) if *used => {
                *used = false;
                self.free.push(index);
                true
            }
            _ => false,
        }
    }

    /// How many are not out.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }
}
