# SPDX-License-Identifier: Apache-2.0
"""Speech by eSpeak NG, through the library of the package espeakng-loader."""

import ctypes
from pathlib import Path

import numpy as np

_SYNCHRONOUS, _DONT_EXIT, _UTF8 = 2, 0x8000, 1  # of espeak-ng/speak_lib.h
_RATE, _PITCH = 1, 3  # numbers of parameters
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Speaker:
    """Speaks words in the voices of eSpeak NG.

    Args:
        package: the unpacked folder ``espeakng_loader``.
    """

    def __init__(self, package: Path) -> None:
        self._library = ctypes.CDLL(str(package / "libespeak-ng.so"))
        data = str(package / "espeak-ng-data").encode()
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _DONT_EXIT)
        if self.rate <= 0:
            raise OSError(f"eSpeak NG cannot read {package / 'espeak-ng-data'}")
        self._samples: list[np.ndarray] = []
        self._callback = _CALLBACK(self._heard)  # kept alive as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)

    def say(
        self, text: str, voice: str, words_per_minute: int = 170, pitch: int = 50
    ) -> np.ndarray:
        """The waveform of ``text``, float32 between -1 and 1, at ``rate`` samples per second.

        Args:
            text: what to say, in the language of the voice.
            voice: such as ``en+f2``: a language, and a variant of the speaker.
            words_per_minute: speed, 80 to 450.
            pitch: 0 to 99.
        """
        self._library.espeak_SetVoiceByName(voice.encode())
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        self._samples.clear()
        spoken = text.encode()
        self._library.espeak_Synth(spoken, len(spoken) + 1, 0, 0, 0, _UTF8, None, None)
        return np.concatenate(self._samples).astype(np.float32) / 2**15

    def _heard(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: int) -> int:
        if samples and count:
            self._samples.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
